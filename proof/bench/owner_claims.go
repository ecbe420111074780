package main

import (
	"context"
	"log/slog"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
)

var claimsOwnership = ownership{
	name:   "claims",
	settle: 40 * time.Second, // the first looks come at random moments within the TTL
	open: func(ctx context.Context, url string, ttl time.Duration) (owner, error) {
		store, err := tenure.OpenPostgres(ctx, url, tenureStore())
		if err != nil {
			return nil, err
		}
		o := &claimsOwner{store: store, over: make(chan struct{})}
		if o.session, err = claims.NewSession(store, claims.SessionConfig{TTL: ttl, Logger: slog.New(slog.DiscardHandler)}); err != nil {
			return nil, err
		}
		if o.keys, err = claims.NewKeys(o.session, "bench"); err != nil {
			return nil, err
		}
		var running context.Context
		running, o.stop = context.WithCancel(context.WithoutCancel(ctx))
		go func() {
			defer close(o.over)
			_ = o.session.Run(running)
		}()
		return o, nil
	},
}

type claimsOwner struct {
	id      string // of the session that claimed last
	store   *tenure.PostgresStore
	session *claims.Session
	keys    *claims.Keys
	stop    context.CancelFunc
	over    chan struct{}
}

func (o *claimsOwner) claim(ctx context.Context, ids []string) error {
	for len(ids) > 0 {
		got, err := o.keys.Claim(ctx, ids...)
		if err != nil {
			return err
		}
		o.id = got[0].Session
		if len(got) == len(ids) {
			return nil
		}
		has := make(map[string]bool, len(got))
		for _, c := range got {
			has[c.Key.ID] = true
		}
		ids = slices.DeleteFunc(slices.Clone(ids), func(id string) bool { return has[id] })
	}
	return nil
}

// renewed reads the time in the session's record. The database's clock is that of this machine.
func (o *claimsOwner) renewed(ctx context.Context, url string) (time.Time, error) {
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		return time.Time{}, err
	}
	defer conn.Close(ctx)
	var at int64
	err = conn.QueryRow(ctx, `SELECT updated_at_ms FROM objects WHERE object_type = 'tenure.session' AND id = $1`, o.id).Scan(&at)
	return time.UnixMilli(at), err
}

func (o *claimsOwner) release(ctx context.Context) error {
	o.stop()
	select {
	case <-o.over:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (o *claimsOwner) close() {
	o.stop()
	<-o.over
	o.store.Close()
}
