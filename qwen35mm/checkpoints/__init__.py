"""What lies on disk: safetensors files, their headers, and which of the model's parameters each tensor fills."""
