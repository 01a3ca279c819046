"""Published speculation: rows, acceptance of drafted tokens, and gains."""
