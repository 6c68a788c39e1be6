"""The Triton kernels. Importing this package needs triton; `dispatch` imports it where it is installed."""
