"""One model by several servers, one after the other."""
