package pgconns_test

import (
	"testing"

	"github.com/tenurelib/tenure/internal/pgconns"
	"github.com/tenurelib/tenure/internal/testkit"
)

func TestMain(m *testing.M) {
	pgconns.PostgresURL = testkit.PostgresURL
	testkit.Main(m)
}
