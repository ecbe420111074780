package claims_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/storetest"
)

// TestAClaimIsLostWhenTheStoreFailsForATTL is an example of docs/testing.md: a database is out of reach for a
// TTL, with a key and a row of a queue claimed, in virtual time.
func TestAClaimIsLostWhenTheStoreFailsForATTL(t *testing.T) {
	queue := claims.QueueConfig{Table: "emails", Done: "sent = 1", Ready: "sent = 0"}
	for name, claimAndDo := range map[string]func(context.Context, *claims.Session, tenure.Store, func(context.Context) error) error{
		"a key": func(ctx context.Context, session *claims.Session, _ tenure.Store, fn func(context.Context) error) error {
			tenants, err := claims.NewKeys(session, "tenant")
			if err != nil {
				return err
			}
			got, err := tenants.Claim(ctx, "acme")
			if err != nil {
				return err
			}
			return tenants.Do(ctx, got[0], fn)
		},
		"a row": func(ctx context.Context, session *claims.Session, store tenure.Store, fn func(context.Context) error) error {
			emails, err := claims.NewQueue(store, queue)
			if err != nil {
				return err
			}
			worker, err := claims.NewWorker(session, emails)
			if err != nil {
				return err
			}
			got, err := worker.Take(ctx, 1)
			if err != nil {
				return err
			}
			return worker.Do(ctx, got[0], fn)
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, stop := context.WithCancel(context.Background())
				db, err := tenure.OpenSQLite(ctx, ":memory:", tenure.SQLiteConfig{Shared: true})
				if err != nil {
					t.Fatal(err)
				}
				defer db.Close()
				columns, err := queue.SQLiteDDL()
				if err != nil {
					t.Fatal(err)
				}
				for _, sql := range []string{`CREATE TABLE emails (id INTEGER PRIMARY KEY, sent INTEGER NOT NULL DEFAULT 0)`, columns, `INSERT INTO emails DEFAULT VALUES`} {
					if _, err := db.DB().ExecContext(ctx, sql); err != nil {
						t.Fatal(err)
					}
				}
				store := storetest.Faulty(db, nil)
				if err := errors.Join(db.Migrate(ctx), claims.Migrate(ctx, store)); err != nil {
					t.Fatal(err)
				}
				session, err := claims.NewSession(store, claims.SessionConfig{}) // its TTL is 30 s
				if err != nil {
					t.Fatal(err)
				}
				ended := make(chan error)
				go func() { ended <- session.Run(ctx) }()

				err = claimAndDo(ctx, session, store, func(ctx context.Context) error {
					time.Sleep(time.Hour) // while the database answers, the claim lasts
					if ctx.Err() != nil {
						t.Error("the claim has ended although nothing has failed")
					}
					store.SetHook(func(context.Context, storetest.Call, func(context.Context) error) error {
						return errors.New("connection refused")
					})
					failed := time.Now()
					<-ctx.Done()
					if after := time.Since(failed); after > 20*time.Second { // the RenewDeadline
						t.Errorf("the func was told to return after %v", after)
					}
					time.Sleep(30*time.Second - time.Since(failed))
					store.SetHook(nil)
					return nil
				})
				if !errors.Is(err, tenure.ErrDeadline) {
					t.Errorf("the claim ended with %v", err)
				}
				for !session.Valid() { // it begins anew
					time.Sleep(time.Second)
				}
				stop()
				if err := <-ended; err != nil {
					t.Error(err)
				}
			})
		})
	}
}
