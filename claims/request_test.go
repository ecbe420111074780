package claims_test

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/storetest"
)

// startReleasing runs a process that releases requested claims, and reports them.
func (w *world) startReleasing(name string) (p *process, asked chan claims.Claim) {
	w.Helper()
	asked = make(chan claims.Claim, 100)
	p = w.startWith(name, claims.SessionConfig{ReleaseRequested: func(c claims.Claim) {
		asked <- c
		if err := p.keys.Release(context.Background(), c); err != nil {
			w.Error(err)
		}
	}})
	return p, asked
}

func (p *process) request(ids ...string) {
	p.w.Helper()
	require.NoError(p.w, p.keys.RequestRelease(context.Background(), ids...))
}

func (p *process) wait(id string) claims.Claim {
	p.w.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), testkit.Patience)
	defer cancel()
	got, err := p.keys.Claim(ctx, id)
	require.NoError(p.w, err)
	return got[0]
}

func TestAnOwnerGivesKeysBackOnRequest(t *testing.T) {
	inBubble(t, func(w *world) {
		a, asked := w.startReleasing("a")
		b := w.start("b")
		a.claim(names(1200)...)
		one, two := a.claimOne("one"), a.claimOne("two")
		returned := a.work(one, 3*time.Second)
		synctest.Wait()
		began := time.Now()
		b.request("one", "two", "a free one")
		synctest.Wait()
		require.Equal(w, two, <-asked)
		require.Empty(w, asked)
		b.claimOne("two")
		require.Equal(w, one.Key, b.wait("one").Key, "its func has to return first")
		require.Equal(w, 3*time.Second, time.Since(began).Round(10*time.Millisecond))
		err := <-returned
		require.ErrorIs(w, err, tenure.ErrResigned)
		require.ErrorContains(w, err, "on request")
		require.Equal(w, 1200, a.keys.Len())
		b.claimOne("a free one")
	})
}

func TestARequestIsFoundEvenIfNobodyIsWoken(t *testing.T) {
	inBubble(t, func(w *world) {
		a, b := w.start("a"), w.start("b")
		a.work(a.claimOne("one"), 0)
		time.Sleep(time.Second)
		b.fault(testkit.Only("wake", testkit.Refuse))
		b.request("one")
		time.Sleep(time.Second)
		require.Empty(w, b.claim("one"))
		time.Sleep(ttl)
		b.claimOne("one")
	})
}

func TestAFuncThatBeginsAfterARequestIsToldAtOnce(t *testing.T) {
	inBubble(t, func(w *world) {
		a, b := w.start("a"), w.start("b")
		c := a.claimOne("one")
		b.request("one")
		time.Sleep(time.Second)
		require.True(w, a.keys.Holds(c), "nothing releases it")
		wantResigned(w.T, a.work(c, 0))
		b.claimOne("one")
	})
}

func TestAClaimIsAskedForOnce(t *testing.T) {
	inBubble(t, func(w *world) {
		var asked []claims.Claim
		a := w.startWith("a", claims.SessionConfig{ReleaseRequested: func(c claims.Claim) { asked = append(asked, c) }})
		b := w.start("b")
		c := a.claimOne("one")
		for range 3 {
			b.request("one")
			time.Sleep(time.Minute)
		}
		require.Equal(w, []claims.Claim{c}, asked)
		require.NoError(w, a.keys.Release(w.Context(), c))
		b.claimOne("one")
		time.Sleep(time.Minute)
		require.Len(w, asked, 1)
	})
}

// The next owner has not been asked.
func TestARequestIsForTheClaimThatStands(t *testing.T) {
	for name, free := range map[string]func(*process, claims.Claim){
		"released": func(p *process, c claims.Claim) { require.NoError(p.w, p.keys.Release(context.Background(), c)) },
		"closed":   func(p *process, c claims.Claim) { p.stop() },
		"crashed":  func(p *process, c claims.Claim) { p.crash(); time.Sleep(ttl) },
		"taken when it is gone": func(p *process, c claims.Claim) {
			p.crash()
			w := p.w
			record, err := w.store.Get(context.Background(), claims.SessionKey(c.Session))
			require.NoError(w, err)
			require.NoError(w, w.store.DeleteIf(context.Background(), record.Key, tenure.IfVersion(record.Version)))
		},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(w *world) {
				a := w.start("a")
				c := a.claimOne("one")
				a.request("one")
				time.Sleep(time.Second)
				rows, err := w.table.Wanted(w.Context(), c.Session, objects.Claim{}, 10, time.Second)
				require.NoError(w, err)
				require.Len(w, rows, 1)
				free(a, c)
				b, asked := w.startReleasing("b")
				next := b.wait("one")
				time.Sleep(2 * ttl)
				require.Empty(w, asked)
				require.True(w, b.keys.Holds(next))
			})
		})
	}
}

// S7.
func TestRequestsCostNothingPerClaim(t *testing.T) {
	inBubble(t, func(w *world) {
		a := w.start("a")
		b := w.start("b")
		ids := names(1000)
		for _, c := range a.claim(ids...) {
			a.work(c, 0)
		}
		time.Sleep(time.Second)
		var traffic testkit.Calls
		a.fault(traffic.Count("", nil))
		b.request(ids...)
		time.Sleep(5 * time.Second)
		require.Len(w, b.claim(ids...), len(ids))
		counts := traffic.Take()
		require.LessOrEqual(w, counts["claims.requested"], 2)
	})
}

func TestARequestThatIsReadLateDoesNotEndALaterClaim(t *testing.T) {
	inBubble(t, func(w *world) {
		a, b := w.start("a"), w.start("b")
		c := a.claimOne("one")
		a.fault(testkit.Only("claims.requested", testkit.AnswerAfter(5*time.Second)))
		b.request("one")
		time.Sleep(time.Second)
		require.NoError(w, a.keys.Release(w.Context(), c))
		returned := a.work(a.claimOne("one"), 0)
		time.Sleep(2 * ttl)
		require.Empty(w, returned)
	})
}

func TestAKeyIsGivenBackOnAServer(t *testing.T) {
	testkit.Slow(t)
	eachServer(t, func(t *testing.T, open func() tenure.Database) {
		cfg := claims.SessionConfig{TTL: 6 * time.Second} // the sweep finds the request
		a, b := newWorld(t, open()).startWith("a", cfg), newWorld(t, open()).startWith("b", cfg)
		a.claim(names(50)...)
		returned := a.work(a.claimOne("one"), 0)
		b.fault(testkit.Only("wake", testkit.Refuse))
		b.request("one", "two")
		b.wait("one")
		require.ErrorIs(t, <-returned, tenure.ErrResigned)
		require.Equal(t, 50, a.keys.Len())
		rows, err := b.w.table.Wanted(t.Context(), b.session.ID(), objects.Claim{}, 10, testkit.Patience)
		require.NoError(t, err)
		require.Empty(t, rows, "the next owner was not asked")
	})
}

func TestOnPostgresARequestIsHeardAtOnce(t *testing.T) {
	url := testkit.PostgresURL(t)
	open := func() *world { return newWorld(t, testkit.OpenPostgres(t, url, tenure.PostgresConfig{})) }
	cfg := claims.SessionConfig{TTL: 10 * time.Minute}
	a, b := open().startWith("a", cfg), open().startWith("b", cfg)
	returned := a.work(a.claimOne("one"), 0)
	time.Sleep(100 * time.Millisecond) // until it listens
	b.request("one")
	wantResigned(t, returned)
}

func wantResigned(t *testing.T, returned chan error) {
	t.Helper()
	select {
	case err := <-returned:
		require.ErrorIs(t, err, tenure.ErrResigned)
	case <-time.After(testkit.Patience):
		t.Fatal("not told")
	}
}

// Fenced writes that overlap lock the row of their claim without a gap.
func TestFencedWritesDelayNoRequest(t *testing.T) {
	url := testkit.PostgresURL(t)
	w := newWorld(t, testkit.OpenPostgres(t, url, tenure.PostgresConfig{}))
	a, b := w.start("a"), w.start("b")
	c, told := a.claimOne("one"), make(chan struct{})
	go func() {
		_ = a.keys.Do(t.Context(), c, func(ctx context.Context) error {
			<-ctx.Done()
			close(told)
			return nil
		})
	}()
	tx, err := testkit.PostgresPool(t, url).Begin(t.Context())
	require.NoError(t, err)
	defer tx.Rollback(context.Background())
	testkit.ExecPostgres(t, tx, `SELECT FROM objects_claims WHERE id = 'one' FOR SHARE`)
	b.request("one")
	select {
	case <-told:
	case <-time.After(testkit.Patience):
		t.Fatal("not told")
	}
	require.Empty(t, b.claim("one"), "the write is still under way")
	require.NoError(t, tx.Rollback(t.Context()))
	b.wait("one")
}

// The sweep would send a statement for them each time, and read more and more of them.
func TestRequestsForClaimsThatHaveEndedAreDeleted(t *testing.T) {
	inBubble(t, func(w *world) {
		a, b := w.start("a"), w.start("b")
		a.fault(testkit.Only("claims.requested", testkit.Refuse))
		for range 5 {
			c := a.claimOne("one")
			b.request("one")
			require.NoError(w, a.keys.Release(w.Context(), c))
		}
		a.fault(nil)
		a.claimOne("two") // without a claim it has nothing to look for
		time.Sleep(2 * ttl)
		rows, err := w.table.Wanted(w.Context(), a.session.ID(), objects.Claim{}, 10, time.Second)
		require.NoError(w, err)
		require.Empty(w, rows)
	})
}

func TestBadInputToRequests(t *testing.T) {
	inBubble(t, func(w *world) {
		a := w.start("a")
		a.claimOne("one")
		a.fault(func(context.Context, storetest.Call, func(context.Context) error) error {
			w.Error("the store was called")
			return nil
		})
		for _, ids := range [][]string{nil, {""}, {"one", "one"}, {"one", "\xff"}} {
			require.ErrorIs(w, a.keys.RequestRelease(w.Context(), ids...), tenure.ErrInvalid, "%q", ids)
		}
		a.fault(nil)
		rows, err := w.table.Wanted(w.Context(), a.session.ID(), objects.Claim{}, 10, time.Second)
		require.NoError(w, err)
		require.Empty(w, rows, "half of it was done")
		_, err = w.store.(*tenure.SQLiteStore).DB().Exec(`DROP TABLE objects_claims`)
		require.NoError(w, err)
		require.ErrorIs(w, a.keys.RequestRelease(w.Context(), "one"), tenure.ErrSetup)
	})
}

// The hint comes when the statement that claims has committed, and before its answer.
func TestARequestBeforeTheAnswerToTheClaimIsHeeded(t *testing.T) {
	inBubble(t, func(w *world) {
		a, b := w.start("a"), w.start("b")
		synctest.Wait()
		slow := storetest.Hook(func(ctx context.Context, call storetest.Call, do func(context.Context) error) error {
			err := do(ctx)
			if call.Op == "claims.take" {
				time.Sleep(300 * time.Millisecond)
			}
			return err
		})
		a.fault(slow)
		claimed := make(chan chan error)
		go func() { claimed <- a.work(a.claimOne("one"), 0) }()
		time.Sleep(100 * time.Millisecond)
		began := time.Now()
		b.request("one")
		b.wait("one")
		require.Less(w, time.Since(began), time.Second)
		wantResigned(t, <-claimed)
	})
}
