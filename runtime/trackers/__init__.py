"""Reporters that `--log` names, each a page: they keep a run where its user keeps all runs."""
