package objects

import (
	"context"
	"time"
)

// RowsConfig is the part of claims.RowsConfig that statements are made of, with its defaults.
type RowsConfig struct {
	Schema, Table                           string
	ID, Session, Token, Attempts, NotBefore string // columns; the last two may be missing
	Ready, OrderBy, Done, Exhausted         string // SQL
}

// Ending is what a statement does with rows whose claims end, beside freeing them.
type Ending struct {
	Done, Exhausted bool          // sets what the config says
	After           time.Duration // keeps them from being taken for so long
}

// RowsTable is a table of the user with claims on its rows, of either database. The kind of its
// claims is left empty.
type RowsTable interface {
	// Check returns an [ErrSetup] that names what is wrong with the table.
	Check(ctx context.Context, limit time.Duration) error
	// TakeReady makes a session the owner of at most n rows that are ready, in their order,
	// except those to skip.
	TakeReady(ctx context.Context, session string, n int, skip []string, limit time.Duration) ([]Claim, error)
	// End frees rows, unless one of the claims has ended: then it returns those that have.
	End(ctx context.Context, how Ending, claims []Claim, limit time.Duration) (lost []Claim, err error)
	Free(ctx context.Context, session, kind string, ids []string, tokens []int64, limit time.Duration) (locked []Claim, err error)
	Owned(ctx context.Context, session, afterKind, afterID string, n int, limit time.Duration) ([]Claim, error)
	Sessions(ctx context.Context, limit time.Duration) ([]Session, error)
}
