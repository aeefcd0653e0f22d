"""What layers keep of a sequence between steps: by kind, as sizes and as tensors."""
