"""The compiler: a model as its author wrote it becomes a folder of readable stages.

    load      a name, a folder, a factory           -> nn.Module and example inputs   models.py
    capture   nn.Module and example inputs          -> one fx.Graph, sizes symbolic   capture/
    profile   graph                                 -> milliseconds and bytes a node  profiler.py
    plan      graph and profile, number of stages   -> stage of every node, a bound   solve.py
    generate  graph and stages                      -> texts of Python files          generate/
    verify    files and the original                -> losses and gradients equal     verify.py

`compile.partition` is these six in a row; each can be used by itself.
"""
