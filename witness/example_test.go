package witness_test

import (
	"context"
	"os"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/witness"
)

func openStore(ctx context.Context) (tenure.Store, error) {
	return tenure.OpenPostgres(ctx, os.Getenv("DATABASE_URL"), tenure.PostgresConfig{})
}

func serve() {} // the server, which competes for leases

// A program that is its own witness.
func ExampleMain() {
	main := func() {
		witness.Main(openStore) // in the process that was started, this does not return
		serve()
	}
	_ = main
}
