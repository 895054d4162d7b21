"""asyncpipe-info: what is here, and what a run would use of it.

software   packages, and the backends that ranks may talk over
machine    processor, memory, GPUs and network interfaces
would_use  ranks -> the device, transport, threads and cores that they would have, and why

`describe` has all of it. Nothing fails because something is missing.
"""
