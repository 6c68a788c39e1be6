"""The page's server: who asks, what may be asked, and where the answers go."""
