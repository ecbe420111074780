package sqliteobjects

import (
	"context"
	"database/sql"
	"errors"
	"log/slog"
	"time"

	"github.com/tenurelib/tenure/internal/objects"
)

// RowsDDL returns what the table lacks.
func RowsDDL(cfg objects.RowsConfig) string { return "" }

type Rows struct{ objects.RowsTable }

func (t *Table) Rows(cfg objects.RowsConfig, logger *slog.Logger) *Rows { return &Rows{} }

func (r *Rows) Check(ctx context.Context, limit time.Duration) error { return errors.ErrUnsupported }
func (r *Rows) Finish(ctx context.Context, claims []objects.Claim, fn func(tx *sql.Tx) error) (lost []objects.Claim, fnErr, err error) {
	return nil, nil, errors.ErrUnsupported
}
