package objects

import (
	"context"
	"time"
)

// ClaimsTable is the table of claims of either database.
type ClaimsTable interface {
	Look(ctx context.Context, kind string, ids []string, limit time.Duration) ([]Claim, error)
	Take(ctx context.Context, session, kind string, ids, gone, missing []string, limit time.Duration) ([]Claim, error)
	Free(ctx context.Context, session, kind string, ids []string, tokens []int64, limit time.Duration) (locked []Claim, err error)
	Owned(ctx context.Context, session, afterKind, afterID string, n int, limit time.Duration) ([]Claim, error)
	Request(ctx context.Context, kind string, ids []string, limit time.Duration) ([]Claim, error)
	Wanted(ctx context.Context, session string, after Claim, n int, limit time.Duration) ([]Claim, error)
	Sessions(ctx context.Context, limit time.Duration) ([]Session, error)
	OfKinds(ctx context.Context, kinds []string, limit time.Duration) ([]Claim, time.Time, error)
	Forget(ctx context.Context, kind string, limit time.Duration) error
	// LongestKey returns how many bytes a key may have together with its kind; 0: any number.
	LongestKey() int
	Prune(ctx context.Context, after int64, n int, limit time.Duration) (last int64, pruned int, err error)
}
