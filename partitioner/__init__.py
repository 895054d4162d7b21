"""The compiler: a model as its author wrote it becomes a folder of readable stages.

    load      a name, a folder, a factory           -> nn.Module and example inputs   models/
    capture   nn.Module and example inputs          -> one fx.Graph, sizes symbolic   capture/
    profile   graph                                 -> milliseconds and bytes a node  profile/
    plan      graph and profile, number of stages   -> stage of every node, a bound   planning/
    generate  graph and stages                      -> texts of Python files          codegen/
    verify    files and the original                -> losses and gradients equal     verify.py

`compile.partition` calls these six phases in a row; each can be used alone.
"""
