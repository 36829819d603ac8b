"""Any corpus to record files: inputs, their parts, and the documents of a part."""
