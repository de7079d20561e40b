"""How models write reasoning and tool calls: one machine, and a short description for each dialect."""
