"""Planning: which draft, how long. Reads records and cost tables, loads no model."""
