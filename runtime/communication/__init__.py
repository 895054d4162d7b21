"""Links between ranks: measured, compared and explained (asyncpipe-comm)."""
