"""What the layers of a model keep of a sequence: pages of keys and values, by groups of layers of one kind; states."""
