"""The eight commands, one module each: parse, call, print.

partition, train, inspect, compare, info, view, job    the `app` of each command
comm, comm_*                                      asyncpipe-comm and its subcommands
options, training_options                         their options, in groups
running                                           error messages and exit codes of all commands
console, run_display                              formatting for the terminal

Heavy modules are imported only when the options are known, so that --help answers immediately.
"""
