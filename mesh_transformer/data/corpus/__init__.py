"""Documents of files: formats, archives and storage, and the sequences that are cut from them."""
