package objects

import (
	"context"
	"strings"
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

	// All frees none of the rows if one of the claims has ended.
	All bool

	// Unlocked leaves rows that somebody has locked, which are then among those that it did not end.
	Unlocked bool
}

// RowsTable is a table of the user with claims on its rows, of either database. The kind of its
// claims is the name of the table.
type RowsTable interface {
	// Check returns an [ErrSetup] that names what is wrong with the table.
	Check(ctx context.Context, limit time.Duration) error
	// TakeReady makes a session the owner of at most n rows that are ready, in their order,
	// except those to skip; of the rows in only, if that is not nil.
	TakeReady(ctx context.Context, session string, n int, skip, only []string, limit time.Duration) ([]Claim, error)
	// Ready returns the IDs of the rows that TakeReady would take.
	Ready(ctx context.Context, n int, skip []string, limit time.Duration) ([]string, error)
	// End frees rows, and returns the claims that had ended before.
	End(ctx context.Context, how Ending, claims []Claim, limit time.Duration) (lost []Claim, err error)
	// EndStatement returns a statement that ends a claim as Done says, or fails.
	EndStatement(claim Claim) (query string, args []any, err error)
	// Look returns those of the rows that exist.
	Look(ctx context.Context, ids []string, limit time.Duration) ([]Claim, error)

	// The following are as of the claims' table.
	Free(ctx context.Context, session, kind string, ids []string, tokens []int64, limit time.Duration) (locked []Claim, err error)
	Owned(ctx context.Context, session, afterKind, afterID string, n int, limit time.Duration) ([]Claim, error)
	Sessions(ctx context.Context, limit time.Duration) ([]Session, error)
}

// Without returns the claims that are not among those that ended.
func Without(claims, ended []Claim) (lost []Claim) {
	if len(claims) == len(ended) {
		return nil
	}
	type row struct {
		id    string
		token int64
	}
	among := make(map[row]bool, len(ended))
	for _, c := range ended {
		among[row{c.ID, c.Token}] = true
	}
	for _, c := range claims {
		if !among[row{c.ID, c.Token}] {
			lost = append(lost, c)
		}
	}
	return lost
}

// Commented returns SQL of the user after which a statement goes on, also if it ends in a comment.
func Commented(sql string) string {
	if strings.Contains(sql, "--") {
		return sql + "\n"
	}
	return sql
}
