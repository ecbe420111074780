package route_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/route"
	"github.com/tenurelib/tenure/storetest"
)

func TestAnOwnerThatRefusesIsAskedAgainAfterAPause(t *testing.T) {
	inBubble(t, func(t *testing.T, store *tenure.SQLiteStore, n *wires) {
		var asked, looks atomic.Int32
		var ready atomic.Bool
		owner := n.owner(t, store, "owner", http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if asked.Add(1); !ready.Load() {
				w.Header().Set("Tenure-Request", "refused")
				w.WriteHeader(http.StatusMisdirectedRequest)
			}
		}), "x")
		var others []string // the keys of another process
		for i := range 100 {
			others = append(others, fmt.Sprint(i))
		}
		n.owner(t, store, "others", http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}), others...)
		link := storetest.Faulty(store, func(ctx context.Context, call storetest.Call, do func(context.Context) error) error {
			if call.Op == "claims.look" {
				looks.Add(1)
			}
			return do(ctx)
		})
		p := n.start(t, link, "a", route.Config{MaxWait: time.Minute})
		ready.Store(true)
		require.Equal(t, http.StatusOK, post(p.route, "/x").Code)
		time.Sleep(time.Second)
		ready.Store(false)
		asked.Store(0)
		answers := make(chan int, 1)
		go func() { answers <- post(p.route, "/x").Code }()
		synctest.Wait()
		require.EqualValues(t, 1, asked.Load(), "not again at once")
		for name, meanwhile := range map[string]func(i int){
			"nothing else happens":                func(int) {},
			"hints come that other keys are free": func(int) { owner.keys.Wake() },
			"first requests for other keys come":  func(i int) { post(p.route, "/"+others[i]) },
		} {
			asked.Store(0)
			looks.Store(0)
			for i := range 100 {
				time.Sleep(30 * time.Millisecond)
				meanwhile(i)
			}
			synctest.Wait()
			require.InDelta(t, 20, asked.Load(), 12, name)
			if name != "hints come that other keys are free" { // each of which may be about this one
				require.Less(t, looks.Load(), int32(150), "a first request costs one look")
			}
		}
		ready.Store(true)
		require.Equal(t, http.StatusOK, <-answers)
	})
}

func TestAKeyThatMovesIsFoundSoonAfterTheHint(t *testing.T) {
	inBubble(t, func(t *testing.T, store *tenure.SQLiteStore, n *wires) {
		former, next := n.start(t, store, "former", route.Config{}), n.start(t, store, "next", route.Config{})
		n.add("next:1", ownerFunc(func(http.ResponseWriter, *http.Request) {}))
		held := testkit.Must(former.keys.Claim(t.Context(), "x"))
		p := n.start(t, store, "a", route.Config{MaxWait: time.Minute})
		answers := make(chan int, 1)
		go func() { answers <- post(p.route, "/x").Code }()
		time.Sleep(5 * time.Second)
		require.NoError(t, former.keys.Release(t.Context(), held...))
		time.Sleep(20 * time.Millisecond)
		testkit.Must(next.keys.TryClaim(t.Context(), "x"))
		began := time.Now()
		require.Equal(t, http.StatusOK, <-answers)
		require.Less(t, time.Since(began), 100*time.Millisecond, "the pauses begin anew")
	})
}

func TestAProcessThatClaimsTooLateFindsTheOwnerAtOnce(t *testing.T) {
	inBubble(t, func(t *testing.T, store *tenure.SQLiteStore, n *wires) {
		faster := n.owner(t, store, "faster", http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "faster") }), "any")
		var once sync.Once
		link := storetest.Faulty(store, func(ctx context.Context, call storetest.Call, do func(context.Context) error) error {
			if call.Op == "claims.take" {
				once.Do(func() { _, _ = faster.keys.TryClaim(ctx, "x") })
			}
			return do(ctx)
		})
		p := n.start(t, link, "a", route.Config{Run: answering})
		began := time.Now()
		require.Equal(t, "faster", post(p.route, "/x").Body.String())
		require.Zero(t, time.Since(began))
	})
}

// The statement that claims a key may have committed while its answer is still under way.
func TestAForwardedRequestWaitsWhileItsKeyIsClaimed(t *testing.T) {
	inBubble(t, func(t *testing.T, store *tenure.SQLiteStore, n *wires) {
		taking, proceed := make(chan bool, 1), make(chan bool)
		link := storetest.Faulty(store, func(ctx context.Context, call storetest.Call, do func(context.Context) error) error {
			if call.Op != "claims.take" {
				return do(ctx)
			}
			err := errors.New("not for everybody")
			if call.IDs[0] == "x" {
				err = do(ctx)
			}
			select {
			case taking <- true:
			default:
			}
			<-proceed
			return err
		})
		p := n.start(t, link, "a", route.Config{Run: answering})
		var hops atomic.Int32
		n.add("a:1", http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { hops.Add(1); p.route.ServeHTTP(w, r) }))
		other := n.start(t, store, "other", route.Config{})
		codes := make(chan int, 3)
		began := time.Now()
		go func() { codes <- post(p.route, "/x").Code }()
		<-taking
		go func() { codes <- post(other.route, "/x").Code }()
		synctest.Wait()
		require.EqualValues(t, 1, hops.Load(), "the owner is known")
		require.Empty(t, codes)
		proceed <- true
		require.Equal(t, []int{200, 200}, []int{<-codes, <-codes})
		require.EqualValues(t, 1, hops.Load())
		require.Zero(t, time.Since(began))

		go func() { codes <- post(p.route, "/y").Code }()
		<-taking
		hop := func(session string) int {
			r := httptest.NewRequest("POST", "http://any/y", nil)
			r.Header.Set("Tenure-Route", fmt.Sprintf("to=%s; least=0; wait=60000", session))
			w := httptest.NewRecorder()
			p.route.ServeHTTP(w, r)
			return w.Code
		}
		began = time.Now()
		require.Equal(t, http.StatusMisdirectedRequest, hop("another"))
		require.Zero(t, time.Since(began), "it is for another session")
		go func() { codes <- hop(p.session.ID()) }()
		synctest.Wait()
		proceed <- true
		require.Equal(t, http.StatusMisdirectedRequest, <-codes)
		require.Zero(t, time.Since(began), "it has not been claimed")
		close(proceed)
		require.Equal(t, http.StatusServiceUnavailable, <-codes)
	})
}

func TestTheTraceIsToldOfEachRequestOnce(t *testing.T) {
	inBubble(t, func(t *testing.T, store *tenure.SQLiteStore, n *wires) {
		h := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			time.Sleep(time.Second)
			if tenantOf(r) == "broken" || tenantOf(r) == "lost" {
				panic(http.ErrAbortHandler)
			}
		})
		token := map[string]int64{}
		run := func(ctx context.Context, c claims.Claim, serve func(http.Handler) error) error {
			token[c.Key.ID] = c.Token
			return serve(h)
		}
		other := n.start(t, store, "other", route.Config{Run: run})
		for _, tenant := range []string{"far", "lost"} {
			func() {
				defer func() { _ = recover() }()
				post(other.route, "/"+tenant)
			}()
		}
		var created *route.Route
		var told []route.Request
		p := n.start(t, store, "a", route.Config{Run: run, Trace: &route.Trace{
			Request: func(r route.Request) { told = append(told, r) }, Created: func(rt *route.Route) { created = rt },
		}})
		require.Same(t, p.route, created)
		require.Zero(t, created.Status())
		for tenant, want := range map[string]route.Request{
			"near":   {Outcome: "answered"},
			"far":    {Outcome: "answered", Sends: 1},
			"broken": {Outcome: "unknown"},
			"lost":   {Outcome: "unknown", Sends: 1},
		} {
			told = nil
			over := make(chan bool)
			go func() {
				defer close(over)
				defer func() { _ = recover() }()
				post(p.route, "/"+tenant)
			}()
			synctest.Wait()
			require.Equal(t, map[bool]route.Status{true: {Running: 1}, false: {Waiting: 1}}[want.Sends == 0], route.Status{Running: created.Status().Running, Waiting: created.Status().Waiting}, tenant)
			<-over
			require.Len(t, told, 1, tenant)
			got := told[0]
			require.Equal(t, want.Outcome == "unknown" && want.Sends > 0, got.Err != nil)
			want.Key, want.Took, want.Err = tenant, time.Second, got.Err
			require.Equal(t, want, got)
		}
		require.Equal(t, 4, created.Status().Keys)

		told = nil
		testkit.Must(other.keys.TryClaim(t.Context(), "nobody"))
		n.add("other:1", nil)
		require.Equal(t, http.StatusServiceUnavailable, post(p.route, "/nobody").Code)
		require.Len(t, told, 1)
		require.Equal(t, "refused", told[0].Outcome)
		require.Equal(t, 10*time.Second, told[0].Waited)
		require.Greater(t, told[0].Sends, 10)
		require.ErrorContains(t, told[0].Err, "no process answered")
	})
}
