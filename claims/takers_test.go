package claims_test

import (
	"context"
	"maps"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure/proof/kit"
	"github.com/tenurelib/tenure/storetest"
)

// Callers in this process need not wait until rows are freed: the record is what matters.
func TestAWaitTakesAKeyOfASessionThatIsGoneBeforeItsRowIsFree(t *testing.T) {
	inBubble(t, func(w *world) {
		a, b := w.start("a"), w.start("b")
		a.claimOne("one")
		synctest.Wait()
		began := time.Now()
		a.crash()
		b.fault(func(ctx context.Context, call storetest.Call, do func(context.Context) error) error {
			if call.Op == "claims.owned" || call.Op == "claims.free" {
				return kit.Hang(ctx, call, do)
			}
			return do(ctx)
		})
		got, err := b.keys.Claim(w.Context(), "one")
		require.NoError(w, err)
		require.Len(w, got, 1)
		require.LessOrEqual(w, time.Since(began), ttl+20*time.Millisecond)
	})
}

// Each row would be written twice, and the claims would take nearly twice as long.
func TestRowsThatCallersTakeAreNotFreedAsWell(t *testing.T) {
	inBubble(t, func(w *world) {
		const n = 20_000
		var taken atomic.Bool
		var looks atomic.Int64
		a, b := w.start("a"), w.start("b")
		require.Len(w, a.claim(names(n)...), n)
		id := a.session.ID()
		a.crash()
		b.fault(func(ctx context.Context, call storetest.Call, do func(context.Context) error) error {
			switch call.Op {
			case "claims.look":
				if taken.Load() {
					looks.Add(1)
				}
			case "claims.take": // slower than to free, which would stay ahead
				taken.Store(true)
				time.Sleep(50 * time.Millisecond)
			case "claims.free":
				time.Sleep(10 * time.Millisecond)
			}
			return do(ctx)
		})
		for ids := names(n); len(ids) > 0; {
			got, err := b.keys.Claim(w.Context(), ids...)
			require.NoError(w, err)
			has := make(map[string]bool)
			for _, c := range got {
				has[c.Key.ID] = true
			}
			ids = slices.DeleteFunc(ids, func(id string) bool { return has[id] })
		}
		kit.Await(w.T, "no row names the session", func() bool { return len(w.owned(id)) == 0 })
		require.Less(w, b.session.Status().Freed, int64(n/10))
		require.Less(w, looks.Load(), int64(10), "what is known to be gone need not be looked at")
	})
}

// What nobody takes is freed once the callers have what they want.
func TestRowsThatCallersDoNotTakeAreFreedAfterTheOthers(t *testing.T) {
	inBubble(t, func(w *world) {
		const n = 5000
		a, b := w.start("a"), w.start("b")
		require.Len(w, a.claim(names(n)...), n)
		id := a.session.ID()
		a.crash()
		_, err := b.keys.Claim(w.Context(), names(n/2)...)
		require.NoError(w, err)
		time.Sleep(time.Second)
		require.Empty(w, w.owned(id))
	})
}

// Who has claimed free keys will probably claim more of them, such as shards that move.
func TestKeysAreClaimedByOneStatementIfTheLastOnesWereFree(t *testing.T) {
	inBubble(t, func(w *world) {
		a, b := w.start("a"), w.start("b")
		require.NoError(w, a.keys.Release(w.Context(), a.claim(names(10)...)...))
		var traffic kit.Calls
		a.fault(traffic.Count("", nil))
		claimed := func(of, ids []string) map[string]int {
			w.Helper()
			got := a.claim(ids...)
			require.Len(w, got, len(of))
			calls := traffic.Take()
			maps.DeleteFunc(calls, func(op string, _ int) bool { return op != "claims.look" && op != "claims.take" })
			require.NoError(w, a.keys.Release(w.Context(), got...))
			traffic.Take()
			return calls
		}
		ids, two, one := names(10), map[string]int{"claims.look": 1, "claims.take": 1}, map[string]int{"claims.take": 1}
		require.Equal(w, two, claimed(ids[:5], ids[:5]))
		require.Equal(w, one, claimed(ids[5:], ids[5:]))
		b.claimOne(ids[0])
		require.Equal(w, map[string]int{"claims.look": 1, "claims.take": 1}, claimed(ids[1:], ids), "one is not")
		require.Equal(w, two, claimed(ids[1:], ids[1:]), "so the next ones may not be either")
		require.Equal(w, one, claimed(ids[1:], ids[1:]))
	})
}
