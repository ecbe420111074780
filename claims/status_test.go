package claims_test

import (
	"context"
	"encoding/json"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/internal/testkit"
)

func TestTheStatusTellsWhatASessionHoldsAndRuns(t *testing.T) {
	inBubble(t, func(w *world) {
		p := w.startWith("a", claims.SessionConfig{Labels: map[string]string{"address": "10.0.0.1"}})
		other, err := claims.NewKeys(p.session, "account")
		require.NoError(w, err)
		got := p.claim("one", "two", "three")
		began := time.Now()
		returned := p.work(got[0], time.Second)
		time.Sleep(15 * time.Second)

		status := p.session.Status()
		require.Equal(w, []claims.KindStatus{{Kind: "account"}, {Kind: "tenant", Claims: 3, Running: 1}}, status.Kinds)
		require.Equal(w, 1, status.Running())
		require.Equal(w, p.session.ID(), status.ID)
		require.Equal(w, "a", status.Holder)
		require.Equal(w, "10.0.0.1", status.Labels["address"])
		require.True(w, status.Valid)
		require.False(w, status.Closing)
		require.Equal(w, began.UTC(), status.Since.UTC())
		require.Equal(w, ttl, status.TTL)
		require.Equal(w, 1, status.Begun)
		require.Zero(w, status.Lost)
		require.Empty(w, status.LastError)
		require.Equal(w, 5*time.Second, time.Since(status.RenewedAt))
		require.Equal(w, ttl-ttl/30-5*time.Second, status.TrustLeft)

		text, err := json.Marshal(status)
		require.NoError(w, err)
		require.Contains(w, string(text), `"kinds":[{"kind":"account","claims":0,"running":0},{"kind":"tenant","claims":3,"running":1}]`)
		require.Contains(w, string(text), `"trust_left_seconds":24`)
		var back claims.Status
		require.NoError(w, json.Unmarshal(text, &back))
		require.True(w, status.Since.Equal(back.Since) && status.RenewedAt.Equal(back.RenewedAt))
		back.Since, back.RenewedAt = status.Since, status.RenewedAt
		require.Equal(w, status, back)

		require.NoError(w, p.keys.Release(w.Context(), got...))
		<-returned
		require.Zero(w, p.session.Status().Running())
		require.Zero(w, other.Len())
	})
}

func TestTheStatusTellsThatASessionCloses(t *testing.T) {
	inBubble(t, func(w *world) {
		p := w.start("a")
		c := p.claimOne("one")
		p.work(c, 5*time.Minute)
		synctest.Wait()
		go p.stop()
		time.Sleep(4 * time.Minute)
		status := p.session.Status()
		require.True(w, status.Closing)
		require.False(w, status.Valid, "nothing may be claimed")
		require.Equal(w, c.Session, status.ID)
		require.Positive(w, status.TrustLeft, "it is renewed")
		require.Equal(w, []claims.KindStatus{{Kind: "tenant", Running: 1}}, status.Kinds)
		require.False(w, status.Stuck)
		require.Zero(w, status.Lost)
		time.Sleep(2 * time.Minute)
		status = p.session.Status()
		require.Zero(w, status.Running())
		require.Zero(w, status.TrustLeft)
	})
}

func TestTheStatusTellsThatASessionIsLostAndThatItsFuncsOverstay(t *testing.T) {
	inBubble(t, func(w *world) {
		p := w.start("a")
		c := p.claimOne("one")
		p.work(c, 5*time.Minute)
		synctest.Wait()
		p.fault(testkit.Refuse)
		time.Sleep(15 * time.Second)
		status := p.session.Status()
		require.True(w, status.Valid)
		require.NotEmpty(w, status.LastError)
		time.Sleep(25 * time.Second)
		status = p.session.Status()
		require.False(w, status.Valid)
		require.False(w, status.Closing)
		require.Equal(w, 1, status.Lost)
		require.NotEmpty(w, status.LastError, "none begins")

		p.fault(nil)
		time.Sleep(10 * time.Second)
		status = p.session.Status()
		require.True(w, status.Valid)
		require.NotEqual(w, c.Session, status.ID)
		require.Equal(w, 2, status.Begun)
		require.Empty(w, status.LastError)
		require.True(w, status.Stuck, "although another session has begun")
		require.Equal(w, []claims.KindStatus{{Kind: "tenant", Running: 1}}, status.Kinds)
		time.Sleep(5 * time.Minute)
		require.False(w, p.session.Status().Stuck)
	})
}

func TestTheStatusCountsWhatWasRemovedAndFreed(t *testing.T) {
	inBubble(t, func(w *world) {
		a, b := w.start("a"), w.start("b")
		a.claim(names(100)...)
		require.NoError(w, b.keys.Release(w.Context(), b.claimOne("mine")), "which does not count")
		a.crash()
		b.fault(testkit.Only("claims.free", testkit.Refuse))
		time.Sleep(2 * ttl)
		status := b.session.Status()
		require.EqualValues(w, 1, status.Removed)
		require.Zero(w, status.Freed)
		require.Positive(w, status.SweepErrors)
		b.fault(nil)
		time.Sleep(2 * ttl)
		status = b.session.Status()
		require.EqualValues(w, 1, status.Removed)
		require.EqualValues(w, 100, status.Freed)
	})
}

// A page or a scrape must not hold up the claims of a process that has many.
func TestTheStatusOfManyClaimsTakesNoLonger(t *testing.T) {
	inBubble(t, func(w *world) {
		p := w.start("a")
		p.claim(names(100)...)
		few := testing.AllocsPerRun(10, func() { p.session.Status() })
		p.claim(names(3000)...)
		require.Equal(w, few, testing.AllocsPerRun(10, func() { p.session.Status() }))
		require.Less(w, few, 40.0)
	})
}

func TestAStatusBeforeTheFirstSession(t *testing.T) {
	inBubble(t, func(w *world) {
		session, err := claims.NewSession(testkit.OpenSQLite(w.T, ":memory:"), claims.SessionConfig{Holder: "a", Logger: testkit.Quiet})
		require.NoError(w, err)
		text, err := json.Marshal(session.Status())
		require.NoError(w, err)
		require.Equal(w, `{"id":"","holder":"a","valid":false,"closing":false,"stuck":false,"last_error":"","kinds":[],"begun":0,"lost":0,"removed":0,"freed":0,"sweep_errors":0,"ttl_seconds":30,"trust_left_seconds":0}`, string(text))
		ctx, cancel := context.WithCancel(w.Context())
		returned := make(chan error)
		go func() { returned <- session.Run(ctx) }()
		time.Sleep(time.Minute)
		require.Contains(w, session.Status().LastError, "call Migrate once")
		cancel()
		require.NoError(w, <-returned)
	})
}
