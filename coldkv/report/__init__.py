"""Reading result files: frames, tables, notes in words, and the regression gate."""
