"""Low-rank adapters over one frozen model: any number of them, each sequence of a batch with its own."""
