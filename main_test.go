package tenure_test

import (
	"testing"

	_ "modernc.org/sqlite"

	"github.com/tenurelib/tenure/proof/kit"
)

func TestMain(m *testing.M) { kit.Main(m) }
