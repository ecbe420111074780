package sqliteobjects

import (
	"database/sql"
	"math"

	"github.com/tenurelib/tenure/internal/objects"
)

// columns returns where to scan the columns of a row. Another program may have stored any
// value in any of them, and such a row has to be readable as well, or nobody could replace
// it.
func columns(r *objects.Row) []any {
	return []any{&r.Name, &r.Labels, &r.Payload, versionColumn{&r.Version}, millisColumn{&r.Created}, millisColumn{&r.Updated}}
}

// millisColumn scans a time. A value that is not a number becomes NULL.
type millisColumn struct{ ms *sql.NullInt64 }

func (c millisColumn) Scan(value any) error {
	*c.ms = integer(value)
	return nil
}

// versionColumn scans a version. Anything but a positive number is read as one above the
// limit, and different numbers almost always as different ones, so that a write can still
// name what was read.
type versionColumn struct{ version *int64 }

func (c versionColumn) Scan(value any) error {
	n := integer(value)
	if *c.version = n.Int64; n.Int64 <= 0 {
		*c.version = max(objects.VersionLimit, math.MaxInt64+n.Int64)
	}
	return nil
}

// integer returns a value of any storage class as a number, without its fraction, or NULL if
// it is not a number.
func integer(value any) sql.NullInt64 {
	if f, ok := value.(float64); ok && f > math.MinInt64 && f < math.MaxInt64 {
		value = int64(f)
	}
	var n sql.NullInt64
	if n.Scan(value) != nil {
		return sql.NullInt64{}
	}
	return n
}
