package main

import (
	"context"

	"github.com/jackc/pgx/v5/pgxpool"
)

// openPool opens the pool of a replica that does not open its own.
func openPool(ctx context.Context, o options) (*pgxpool.Pool, error) {
	cfg, err := pgxpool.ParseConfig(o.url)
	if err != nil {
		return nil, err
	}
	if o.conns > 0 {
		cfg.MaxConns = int32(o.conns)
	}
	return pgxpool.NewWithConfig(ctx, cfg)
}
