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
		o := &claimsOwner{store: store}
		if o.session, err = newSession(store, ttl); err != nil {
			return nil, err
		}
		if o.keys, err = claims.NewKeys(o.session.Session, "bench"); err != nil {
			return nil, err
		}
		o.session.start(ctx)
		return o, nil
	},
}

// session is a session that runs until stop is called.
type session struct {
	*claims.Session
	stop context.CancelFunc
	over chan struct{} // closed when the session has ended
}

func newSession(store *tenure.PostgresStore, ttl time.Duration) (*session, error) {
	s, err := claims.NewSession(store, claims.SessionConfig{TTL: ttl, Logger: slog.New(slog.DiscardHandler)})
	return &session{Session: s, over: make(chan struct{})}, err
}

func (s *session) start(ctx context.Context) {
	ctx, s.stop = context.WithCancel(context.WithoutCancel(ctx))
	go func() {
		defer close(s.over)
		_ = s.Run(ctx)
	}()
}

func (s *session) end() {
	s.stop()
	<-s.over
}

type claimsOwner struct {
	id      string // of the session that claimed last
	store   *tenure.PostgresStore
	session *session
	keys    *claims.Keys
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

func (o *claimsOwner) renewed(ctx context.Context, url string) (time.Time, error) {
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		return time.Time{}, err
	}
	defer conn.Close(ctx)
	return lastRenewed(ctx, conn, o.id)
}

func (o *claimsOwner) release(ctx context.Context) error {
	o.session.stop()
	return await(ctx, o.session.over)
}

func (o *claimsOwner) close() {
	o.session.end()
	o.store.Close()
}
