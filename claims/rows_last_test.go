package claims_test

import (
	"context"
	"database/sql"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/internal/testkit"
)

func TestTheLastFailureOfARowRetiresItAtOnce(t *testing.T) {
	for _, how := range []string{"Exhausted", "OnExhausted", "OnExhausted fails once"} {
		t.Run(how, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				store, s, log := loggedSession(t)
				cfg := claims.QueueConfig{
					Table: "mails", Attempts: "attempts", Ready: "status = 'queued'", Done: "status = 'sent'", MaxAttempts: 3,
					Backoff: func(claims.Claim) time.Duration { return time.Minute },
				}
				var q *claims.Queue
				var retired atomic.Int64
				if how == "Exhausted" {
					cfg.Exhausted = "status = 'failed'"
				} else {
					cfg.OnExhausted = func(ctx context.Context, c claims.Claim) error {
						if retired.Add(1) == 1 && how != "OnExhausted" {
							return errors.New("not now")
						}
						return q.FinishSQLite(ctx, []claims.Claim{c}, func(tx *sql.Tx) error {
							_, err := tx.ExecContext(ctx, `UPDATE mails SET status = 'failed'`)
							return err
						})
					}
				}
				testkit.ExecSQL(t, store.DB(), `CREATE TABLE mails (id INTEGER PRIMARY KEY, status TEXT NOT NULL DEFAULT 'queued')`)
				testkit.ExecSQL(t, store.DB(), testkit.Must(cfg.SQLiteDDL()))
				testkit.ExecSQL(t, store.DB(), `INSERT INTO mails DEFAULT VALUES`)
				q = testkit.Must(claims.NewQueue(store, cfg))
				w := testkit.Must(claims.NewWorker(s, q))
				ctx, stop, ended := runSession(t, s)
				calls := 0
				serve := func(d time.Duration) {
					serving, cancel := context.WithTimeout(ctx, d)
					defer cancel()
					require.NoError(t, w.Serve(serving, 1, func(context.Context, claims.Claim) error {
						calls++
						return errors.New("no such address")
					}))
				}
				state := func() (status string, attempts int) {
					require.NoError(t, store.DB().QueryRow(`SELECT status, attempts FROM mails WHERE session IS NULL`).Scan(&status, &attempts))
					return status, attempts
				}
				serve(150 * time.Second) // the third failure is after two minutes
				require.Equal(t, 3, calls)
				if how == "OnExhausted fails once" { // then the next take retires it
					serve(5 * time.Minute)
					require.Equal(t, 3, calls)
					require.EqualValues(t, 2, retired.Load())
				} else {
					status, attempts := state()
					require.Equal(t, "failed", status)
					require.Equal(t, 3, attempts)
				}
				status, _ := state()
				require.Equal(t, "failed", status)
				require.Contains(t, log.String(), `msg="row has failed for the last time" table=mails id=1 attempts=3 error="no such address"`)
				stop()
				require.NoError(t, <-ended)
			})
		})
	}
}
