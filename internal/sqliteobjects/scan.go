package sqliteobjects

import (
	"context"
	"database/sql"
	"encoding/json"
	"math"
	"time"

	"github.com/tenurelib/tenure/internal/objects"
)

// columns returns where to scan the columns of a row. Another program may have stored any value in
// any column, and such a row must still be readable; otherwise it could not be replaced.
func columns(r *objects.Row) []any {
	return []any{&r.Name, &r.Labels, &r.Payload, versionColumn{&r.Version}, millisColumn{&r.Created}, millisColumn{&r.Updated}}
}

// millisColumn scans a time. A value that is not a number becomes NULL.
type millisColumn struct{ ms *sql.NullInt64 }

func (c millisColumn) Scan(value any) error {
	*c.ms = integer(value)
	return nil
}

// versionColumn scans a version. Anything but a positive number is read as a version above the
// limit, and different numbers almost always as different versions, so that a write can still name
// what was read.
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

// reader is a *sql.DB, *sql.Conn or *sql.Tx.
type reader interface {
	QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
	QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
}

// all scans every row that a query returns. It waits while another connection locks out readers, as [Table.Get] does.
func all[T any](ctx context.Context, db reader, scan func(*sql.Rows) (T, error), query string, args ...any) (found []T, err error) {
	err = whenFree(ctx, func() error {
		rows, err := db.QueryContext(ctx, query, args...)
		if err != nil {
			return err
		}
		defer rows.Close()
		for found = nil; rows.Next(); {
			one, err := scan(rows)
			if err != nil {
				return err
			}
			found = append(found, one)
		}
		return rows.Err()
	})
	if err != nil {
		return nil, err
	}
	return found, nil
}

// allWithin is all outside of a transaction, for a call that may take limit.
func allWithin[T any](ctx context.Context, t *Table, limit time.Duration, scan func(*sql.Rows) (T, error), query string, args ...any) ([]T, error) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	found, err := all(ctx, t.db, scan, query, args...)
	return found, t.explain(err)
}

// list returns values as an argument of json_each.
func list[T any](values []T) string {
	if len(values) == 0 {
		return "[]"
	}
	b, _ := json.Marshal(values) // text and numbers always encode
	return string(b)
}
