"""Makes a LoRA adapter from a person's own captions or chats by transformers' Trainer and PEFT, and gates for KV."""
