"""Makes a LoRA adapter from a person's own captions or chats; transformers' Trainer and PEFT do the training."""
