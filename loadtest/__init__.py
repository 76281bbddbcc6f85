"""Load tests: what happens when more arrives than the engine can do. `python -m loadtest.overload --help`"""
