package main

import (
	"context"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
)

// floorClaims claims keys by one bare statement per thousand, on one connection, and returns how
// many per second.
func floorClaims(ctx context.Context, url string, ids []string) (rate float64, err error) {
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		return 0, err
	}
	defer conn.Close(ctx)
	_, err = conn.Exec(ctx, `
		CREATE TABLE floor_claims (kind text, id text, session text, token bigint NOT NULL, PRIMARY KEY (kind, id));
		CREATE INDEX ON floor_claims (session, kind, id) WHERE session IS NOT NULL`)
	if err != nil {
		return 0, err
	}
	began := time.Now()
	for some := range slices.Chunk(ids, 1000) {
		_, err := conn.Exec(ctx, `
			INSERT INTO floor_claims SELECT 'bench', id, 'session', 1 FROM unnest($1::text[]) id
			ON CONFLICT (kind, id) DO UPDATE SET session = excluded.session, token = floor_claims.token + 1
				WHERE floor_claims.session IS NULL`, some)
		if err != nil {
			return 0, err
		}
	}
	return float64(len(ids)) / time.Since(began).Seconds(), nil
}
