"""Dialects of reasoning and tool calls: one parser, and a short description of each dialect."""
