"""Everything between torch's memory and XLA's executables: devices, DLPack transfers, layouts, and the call itself."""
