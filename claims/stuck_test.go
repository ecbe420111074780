package claims_test

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/internal/testkit"
)

// loggedSession returns a session in a SQLite database in memory, and what it logs.
func loggedSession(t *testing.T) (store *tenure.SQLiteStore, s *claims.Session, log *testkit.SyncBuffer) {
	log, store = new(testkit.SyncBuffer), testkit.OpenSQLite(t, ":memory:")
	testkit.MigrateClaims(t, store)
	return store, testkit.Must(claims.NewSession(store, claims.SessionConfig{Logger: slog.New(slog.NewTextHandler(log, nil))})), log
}

func runSession(t *testing.T, s *claims.Session) (ctx context.Context, stop func(), ended chan error) {
	ctx, stop = context.WithCancel(t.Context())
	ended = make(chan error, 1)
	go func() { ended <- s.Run(ctx) }()
	return ctx, stop, ended
}

func TestAFuncThatWasToldToReturnAndDoesNotIsNamed(t *testing.T) {
	for name, tell := range map[string]func(t *testing.T, keys *claims.Keys, stop func()){
		"shutdown": func(_ *testing.T, _ *claims.Keys, stop func()) { stop() },
		"request": func(t *testing.T, keys *claims.Keys, _ func()) {
			require.NoError(t, keys.RequestRelease(t.Context(), "acme"))
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				_, s, log := loggedSession(t)
				keys := testkit.Must(claims.NewKeys(s, "tenant"))
				ctx, stop, ended := runSession(t, s)
				got, err := keys.Claim(ctx, "acme")
				require.NoError(t, err)
				free, returned := make(chan bool), make(chan error, 1)
				go func() {
					returned <- keys.Do(context.Background(), got[0], func(context.Context) error { <-free; return nil })
				}()
				time.Sleep(time.Minute)
				tell(t, keys, stop)
				time.Sleep(5 * time.Second)
				require.NotContains(t, log.String(), "was told to return")
				time.Sleep(30 * time.Second)
				require.Equal(t, 1, strings.Count(log.String(), `msg="func was told to return and has not" claim=tenant/acme cause=`), log.String())
				close(free)
				require.NoError(t, <-returned)
				stop()
				require.NoError(t, <-ended)
			})
		})
	}
}

func TestAFuncThatReturnsWhenItIsToldToIsNotNamed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, s, log := loggedSession(t)
		keys := testkit.Must(claims.NewKeys(s, "tenant"))
		ctx, stop, ended := runSession(t, s)
		for range 3 {
			got, err := keys.Claim(ctx, "acme")
			require.NoError(t, err)
			err = keys.Do(ctx, got[0], func(ctx context.Context) error {
				require.NoError(t, keys.RequestRelease(t.Context(), "acme"))
				<-ctx.Done()
				time.Sleep(9 * time.Second)
				return nil
			})
			require.NoError(t, err)
			time.Sleep(20 * time.Second)
		}
		require.NotContains(t, log.String(), "was told to return")
		stop()
		require.NoError(t, <-ended)
	})
}

func TestASessionThatNobodyRunsIsNoticed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, s, log := loggedSession(t)
		keys := testkit.Must(claims.NewKeys(s, "tenant"))
		claimed := make(chan error, 2)
		for _, id := range []string{"a", "b"} {
			go func() {
				_, err := keys.Claim(t.Context(), id)
				claimed <- err
			}()
		}
		time.Sleep(time.Minute)
		require.Equal(t, 1, strings.Count(log.String(), "Session.Run was not called"), log.String())
		require.Contains(t, s.Status().LastError, "Session.Run was not called")
		_, stop, ended := runSession(t, s)
		require.NoError(t, <-claimed)
		require.NoError(t, <-claimed)
		require.Empty(t, s.Status().LastError)
		stop()
		require.NoError(t, <-ended)
	})
}

// The table does not count attempts, so the pauses grow by what the process remembers.
func TestARowThatKeepsFailingIsTriedLessOftenAndToldAboutOnceAnHour(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store, s, log := loggedSession(t)
		cfg := claims.QueueConfig{Table: "mails", Ready: "status = 'queued'", Done: "status = 'sent'"}
		testkit.ExecSQL(t, store.DB(), `CREATE TABLE mails (id INTEGER PRIMARY KEY, status TEXT NOT NULL DEFAULT 'queued')`)
		testkit.ExecSQL(t, store.DB(), testkit.Must(cfg.SQLiteDDL()))
		testkit.ExecSQL(t, store.DB(), `INSERT INTO mails DEFAULT VALUES`)
		w := testkit.Must(claims.NewWorker(s, testkit.Must(claims.NewQueue(store, cfg))))
		ctx, stop, ended := runSession(t, s)
		serving, cancel := context.WithTimeout(ctx, 30*time.Minute)
		defer cancel()
		calls := 0
		require.NoError(t, w.Serve(serving, 1, func(context.Context, claims.Claim) error {
			calls++
			return errors.New("no such address")
		}))
		require.Greater(t, calls, 8)
		require.Less(t, calls, 20) // 1,800 if each pause is a second
		require.Equal(t, 1, strings.Count(log.String(), `level=WARN msg="row failed"`), log.String())

		// A shutdown is no failure.
		serving, cancel = context.WithCancel(ctx)
		go func() {
			time.Sleep(10 * time.Minute)
			stop()
		}()
		require.NoError(t, w.Serve(serving, 1, func(ctx context.Context, _ claims.Claim) error { <-ctx.Done(); return ctx.Err() }))
		cancel()
		require.NoError(t, <-ended)
		require.Equal(t, 1, strings.Count(log.String(), "level=WARN"), log.String())
		require.Contains(t, log.String(), `level=INFO msg="row was given back before it was done"`)
	})
}
