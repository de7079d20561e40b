"""KServe's open inference protocol over gRPC, with health and reflection."""
