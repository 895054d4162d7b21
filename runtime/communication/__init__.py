"""What the links between ranks can do: measured, compared and explained (asyncpipe-comm)."""
