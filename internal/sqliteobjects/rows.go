package sqliteobjects

import "github.com/tenurelib/tenure/internal/objects"

// RowsDDL returns what the table lacks.
func RowsDDL(cfg objects.RowsConfig) string { return "" }
