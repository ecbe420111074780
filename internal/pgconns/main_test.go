package pgconns_test

import (
	"testing"

	"github.com/tenurelib/tenure/internal/pgconns"
	"github.com/tenurelib/tenure/proof/kit"
)

func TestMain(m *testing.M) {
	pgconns.PostgresURL = kit.PostgresURL
	kit.Main(m)
}
