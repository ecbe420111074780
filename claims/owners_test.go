package claims_test

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
)

func TestOwnersNamesTheSessionOfEachOwnedKey(t *testing.T) {
	inBubble(t, func(w *world) {
		a := w.startWith("a", claims.SessionConfig{Labels: map[string]string{"address": "a:1"}})
		b := w.start("b")
		require.Len(t, a.claim(names(1200)...), 1200)
		b.claimOne("of-b")
		gone := a.claimOne("free")
		require.NoError(t, a.keys.Release(w.Context(), gone))

		owners, err := b.keys.Owners(w.Context(), append(names(1200), "of-b", "free", "never")...)
		require.NoError(t, err)
		require.Len(t, owners, 1201, "of 1203 keys, two are free")
		require.Equal(t, "a:1", owners["t001199"].Labels["address"])
		require.Equal(t, claims.SessionKey(a.session.ID()), owners["t000000"].Key)
		require.Equal(t, claims.SessionKey(b.session.ID()), owners["of-b"].Key)

		_, err = b.keys.Owners(w.Context(), "x", "x")
		require.ErrorIs(t, err, tenure.ErrInvalid)
		one, err := b.keys.Owner(w.Context(), "of-b")
		require.NoError(t, err)
		require.Equal(t, owners["of-b"].Term, one.Term)
	})
}

func TestAFuncFindsItsClaimAndKeepsItUntilItReturns(t *testing.T) {
	inBubble(t, func(w *world) {
		require.Zero(t, claims.ClaimFromContext(w.Context()))
		p, lost := w.start("a"), w.start("b")
		serve := func(p *process, c claims.Claim, told, end chan struct{}) (returned chan error) {
			returned = make(chan error, 1)
			go func() {
				returned <- p.keys.Do(context.Background(), c, func(ctx context.Context) error {
					if got := claims.ClaimFromContext(ctx); got != c || !p.keys.Keeps(got) {
						t.Errorf("the claim is %+v, want %+v", got, c)
					}
					<-ctx.Done()
					close(told)
					<-end
					return nil
				})
			}()
			return returned
		}
		c, told, end := p.claimOne("x"), make(chan struct{}), make(chan struct{})
		require.False(t, p.keys.Keeps(c), "no func runs yet")
		returned := serve(p, c, told, end)
		synctest.Wait() // otherwise the session may close first, and the func never begin
		stopped := make(chan struct{})
		go func() { p.stop(); close(stopped) }()
		<-told
		require.False(t, p.keys.Holds(c), "the session closes")
		require.True(t, p.keys.Keeps(c), "the key is kept until its func returns")
		close(end)
		require.NoError(t, <-returned)
		require.False(t, p.keys.Keeps(c))
		<-stopped

		c, told, end = lost.claimOne("y"), make(chan struct{}), make(chan struct{})
		returned = serve(lost, c, told, end)
		synctest.Wait()
		lost.crash()
		time.Sleep(ttl)
		<-told
		require.False(t, lost.keys.Keeps(c), "the session is lost")
		close(end)
		require.ErrorIs(t, <-returned, tenure.ErrDeadline)
	})
}
