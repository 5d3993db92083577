"""The drivers, one for each system; driver.py and driver.mjs say what they do."""
