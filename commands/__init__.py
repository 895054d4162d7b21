"""The five commands, a module each: parse, call, print.

partition, train, inspect, compare, info    an `app` of cyclopts each
partition_options, training_options         their options, in groups
running                                     runs an app: what is told of errors, exit codes

How things look is in terminal*.py. Nothing heavy is imported before the options are known, so that
--help answers at once.
"""
