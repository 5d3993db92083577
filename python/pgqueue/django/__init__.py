"""Django: `INSTALLED_APPS += ["pgqueue.django"]` gives `manage.py pgqueue_worker`."""
