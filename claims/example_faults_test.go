package claims_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	_ "modernc.org/sqlite"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/storetest"
)

// TestAKeyWhoseAnswerWasLostIsClaimedAgain is the example of docs/testing.md: claims in virtual time.
func TestAKeyWhoseAnswerWasLostIsClaimedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, stop := context.WithCancel(context.Background())
		db, err := tenure.OpenSQLite(ctx, ":memory:", tenure.SQLiteConfig{Shared: true})
		if err != nil {
			t.Fatal(err)
		}
		defer db.Close()
		lost := false
		store := storetest.Faulty(db, func(ctx context.Context, call storetest.Call, do func(context.Context) error) error {
			err := do(ctx)
			if call.Op == "claims.take" && !lost {
				lost = true
				return errors.New("connection reset")
			}
			return err
		})
		if err := errors.Join(db.Migrate(ctx), claims.Migrate(ctx, store)); err != nil {
			t.Fatal(err)
		}
		session, err := claims.NewSession(store, claims.SessionConfig{})
		if err != nil {
			t.Fatal(err)
		}
		tenants, err := claims.NewKeys(session, "tenant")
		if err != nil {
			t.Fatal(err)
		}
		ended := make(chan error)
		go func() { ended <- session.Run(ctx) }()

		began := time.Now()
		got, err := tenants.Claim(ctx, "acme") // the first statement has claimed it, and nobody knows
		if err != nil || len(got) != 1 || !lost {
			t.Errorf("got %v and error %v", got, err)
		}
		if took := time.Since(began); took > time.Minute {
			t.Errorf("it took %v", took)
		}
		stop()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}
