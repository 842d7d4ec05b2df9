"""Other people's engines, each run in an environment of its own: see `make_env.sh`."""
