package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"
	"github.com/jackc/pgx/v5"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/internal/testkit"
)

func TestHistoriesOfAKeyAreChecked(t *testing.T) {
	claimed := claimOp{claim, "a", 5, done}
	for name, test := range map[string]struct {
		history []claimOp // in order; operations with an unknown outcome may happen at any later time
		want    porcupine.CheckResult
	}{
		"the owner is found":                   {[]claimOp{claimed, {get, "a", 0, done}}, porcupine.Ok},
		"another claim is refused":             {[]claimOp{claimed, {claim, "b", 0, refused}}, porcupine.Ok},
		"two claim":                            {[]claimOp{claimed, {claim, "b", 6, done}}, porcupine.Illegal},
		"one claims twice":                     {[]claimOp{claimed, {claim, "a", 6, done}}, porcupine.Illegal},
		"a free key is refused":                {[]claimOp{claimed, {release, "a", 5, done}, {claim, "b", 0, refused}}, porcupine.Illegal},
		"the next owner":                       {[]claimOp{claimed, {release, "a", 5, done}, {claim, "b", 6, done}, {get, "b", 0, done}}, porcupine.Ok},
		"a token comes back":                   {[]claimOp{claimed, {release, "a", 5, done}, {claim, "b", 5, done}}, porcupine.Illegal},
		"a token goes back":                    {[]claimOp{claimed, {release, "a", 5, done}, {claim, "a", 4, done}}, porcupine.Illegal},
		"nobody is found":                      {[]claimOp{claimed, {get, "", 0, done}}, porcupine.Illegal},
		"a former owner is found":              {[]claimOp{claimed, {release, "a", 5, done}, {claim, "b", 6, done}, {get, "a", 0, done}}, porcupine.Illegal},
		"a release is lost":                    {[]claimOp{claimed, {release, "a", 5, done}, {get, "a", 0, done}}, porcupine.Illegal},
		"a write in time":                      {[]claimOp{claimed, {fenced, "a", 5, done}}, porcupine.Ok},
		"a write of the owner is refused":      {[]claimOp{claimed, {fenced, "a", 5, refused}}, porcupine.Illegal},
		"a late write":                         {[]claimOp{claimed, {release, "a", 5, done}, {claim, "b", 6, done}, {fenced, "a", 5, done}}, porcupine.Illegal},
		"a late write under the same session":  {[]claimOp{claimed, {release, "a", 5, done}, {claim, "a", 6, done}, {fenced, "a", 5, done}}, porcupine.Illegal},
		"a late write is refused":              {[]claimOp{claimed, {release, "a", 5, done}, {fenced, "a", 5, refused}}, porcupine.Ok},
		"a session ends":                       {[]claimOp{claimed, {end, "a", 0, done}, {claim, "b", 6, done}}, porcupine.Ok},
		"another session ends":                 {[]claimOp{claimed, {end, "c", 0, done}, {claim, "b", 6, done}}, porcupine.Illegal},
		"a claim after the session's end":      {[]claimOp{{end, "a", 0, done}, claimed, {end, "a", 0, done}, {claim, "b", 6, done}}, porcupine.Ok},
		"a lost answer":                        {[]claimOp{{claim, "a", 0, unknown}, {claim, "b", 0, refused}, {get, "a", 0, done}}, porcupine.Ok},
		"a lost answer, and then the key":      {[]claimOp{{claim, "a", 0, unknown}, {get, "a", 0, done}, {claim, "a", 5, done}, {claim, "b", 0, refused}}, porcupine.Ok},
		"a lost answer that is looked after":   {[]claimOp{{claim, "a", 0, unknown}, {get, "a", 0, done}, {claim, "b", 5, done}}, porcupine.Ok},
		"a lost answer to another":             {[]claimOp{{claim, "a", 0, unknown}, {get, "b", 0, done}}, porcupine.Illegal},
		"a lost request, and another's key":    {[]claimOp{claimed, {claim, "b", 0, unknown}, {get, "b", 0, done}}, porcupine.Illegal},
		"a lost answer to a release":           {[]claimOp{claimed, {release, "a", 5, unknown}, {claim, "b", 6, done}}, porcupine.Ok},
		"a lost answer to a release of others": {[]claimOp{claimed, {release, "a", 4, unknown}, {claim, "b", 6, done}}, porcupine.Illegal},
	} {
		var history []porcupine.Operation
		for i, o := range test.history {
			back := int64(10*i + 5)
			if o.Outcome == unknown {
				back = int64(forever)
			}
			history = append(history, porcupine.Operation{Call: int64(10 * i), Output: o, Return: back})
		}
		if got := judgeClaims(history); got != test.want {
			t.Errorf("%s: got %s, want %s", name, got, test.want)
		}
	}
}

// TestHistoriesOfClaimsAreLinearizable lets processes claim, release, write and ask for keys
// on real servers. Some of them crash.
func TestHistoriesOfClaimsAreLinearizable(t *testing.T) {
	t.Run("postgres", func(t *testing.T) {
		url := testkit.PostgresURL(t)
		claimsAreLinearizable(t, func() (tenure.Database, func(context.Context, claims.Claim) error) {
			store, err := tenure.OpenPostgres(t.Context(), url, tenure.PostgresConfig{Logger: slog.New(slog.DiscardHandler)})
			if err != nil {
				t.Fatal(err)
			}
			return store, func(ctx context.Context, c claims.Claim) error {
				return store.Fenced(ctx, c, func(pgx.Tx) error { return nil })
			}
		})
	})
	t.Run("sqlite", func(t *testing.T) {
		file := filepath.Join(t.TempDir(), "tenure.db")
		claimsAreLinearizable(t, func() (tenure.Database, func(context.Context, claims.Claim) error) {
			store, err := tenure.OpenSQLite(t.Context(), file, tenure.SQLiteConfig{Shared: true, Logger: slog.New(slog.DiscardHandler)})
			if err != nil {
				t.Fatal(err)
			}
			return store, func(ctx context.Context, c claims.Claim) error {
				return store.Fenced(ctx, c, func(*sql.Tx) error { return nil })
			}
		})
	})
}

func claimsAreLinearizable(t *testing.T, open func() (tenure.Database, func(context.Context, claims.Claim) error)) {
	const length = 10 * time.Second
	store, _ := open()
	if err := migrate(t.Context(), store); err != nil {
		t.Fatal(err)
	}
	defer store.Close()
	history := newClaimHistory()
	ctx, cancel := context.WithTimeout(t.Context(), length)
	defer cancel()
	var running sync.WaitGroup
	for i := range 4 {
		running.Go(func() {
			for ctx.Err() == nil {
				store, fenced := open()
				lives := length
				if i == 0 { // this one crashes again and again
					lives = time.Second + rand.N(2*time.Second)
				}
				life, kill := context.WithTimeout(ctx, lives)
				history.process(life, ctx, i, store, fenced)
				kill()
			}
		})
	}
	running.Wait()
	operations, outcomes := 0, map[string]int{}
	for id := range history.keys {
		ops := history.of(id)
		operations += len(ops)
		for _, o := range ops {
			outcomes[o.Output.(claimOp).Do+" "+o.Output.(claimOp).Outcome]++
		}
		if got := judgeClaims(ops); got == porcupine.Illegal {
			t.Errorf("the history of %s is not linearizable:", id)
			for _, o := range ops {
				t.Logf("%12v %12v %v", time.Duration(o.Call), time.Duration(o.Return), o.Output)
			}
		}
	}
	t.Logf("%d operations on %d keys: %v", operations, len(history.keys), outcomes)
	for _, what := range []string{"claim done", "claim refused", "release done", "get done", "fenced write done", "fenced write refused"} {
		if outcomes[what] < 10 {
			t.Errorf("%s: %d times, too few to prove anything", what, outcomes[what])
		}
	}
}

// process runs a process until life ends: then it crashes, unless all is over.
func (h *claimHistory) process(life, all context.Context, number int, store tenure.Database, fenced func(context.Context, claims.Claim) error) {
	session, err := claims.NewSession(store, claims.SessionConfig{TTL: 2 * time.Second, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		panic(err)
	}
	keys, err := claims.NewKeys(session, "history")
	if err != nil {
		panic(err)
	}
	p := &claimant{number, h, session, keys, fenced}
	ctx, closes := context.WithCancel(context.Background())
	returned := make(chan error)
	go func() { returned <- session.Run(ctx) }()
	var working sync.WaitGroup
	for range 2 {
		working.Go(func() { p.work(life) })
	}
	<-life.Done()
	id, from := session.ID(), monotonic()
	crash := all.Err() == nil
	if crash {
		_ = store.Close() // nothing that it sends arrives any more
	}
	working.Wait()
	closes()
	if err := <-returned; err != nil && !(crash && errors.Is(err, tenure.ErrClosed)) {
		panic(err)
	}
	if !crash {
		if id != "" {
			h.ended(id, from)
		}
		_ = store.Close()
	}
}

// work claims some keys at a time, among those that all processes use for half a second.
func (p *claimant) work(ctx context.Context) {
	for ctx.Err() == nil {
		now := monotonic() / (500 * time.Millisecond)
		ids := []string{fmt.Sprint(int64(now), "a"), fmt.Sprint(int64(now), "b"), fmt.Sprint(int64(now), "c")}
		some := ids[:1+rand.N(len(ids))]
		call, cancel := context.WithTimeout(context.WithoutCancel(ctx), 3*time.Second)
		got := p.claim(call, some)
		if rand.N(2) == 0 {
			p.owner(call, ids[rand.N(len(ids))])
		}
		var written []claims.Claim
		for _, c := range got {
			p.write(call, c)
			written = append(written, c)
		}
		time.Sleep(rand.N(20 * time.Millisecond))
		if len(got) > 0 {
			p.release(call, got)
		}
		for _, c := range written {
			if rand.N(3) == 0 {
				p.write(call, c) // too late
			}
		}
		p.history.stands(p.session.ID())
		cancel()
	}
}
