"""A soak with a judge: clients that do anything, a nemesis that breaks anything, and a verdict.

    make soak MINUTES=10          episodes of a minute, each with a server of its own
    make soak ARGS='--seed 7'     with these random numbers

An episode (episode.py) starts a server, clients (flow.py, limits.py, operator.py, workers.py) and a
nemesis (nemesis.py). Each client writes down what it called and what came of it (history.py), and the
server what has committed, in that order (commits.py: logical decoding). At the end the faults stop, and
all that waits must come to rest. Then the judge (judge.py, and the rules_*.py that it applies) reads
both, and nothing else: it knows what pgqueue promises, not how it works. mutants.py are small edits of
the SQL, each of which it must catch: `make mutants`.
"""
