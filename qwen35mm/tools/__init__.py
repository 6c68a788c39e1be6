"""Tools of MCP servers: which there are, and their calls within limits. Knows no model and no page.

Imports the SDK (the extra `tools`) when the first server starts.
"""
